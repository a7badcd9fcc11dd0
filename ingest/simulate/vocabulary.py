"""Words for the generator's world. All are invented or everyday; places are real or plausible."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Country:
    """A country of groups.

    Attributes:
        code: two letters, as in an RSVP's ``group_country``.
        weight: relative share among groups.
        latitude, longitude: of its center, degrees.
        cities: names, the largest first.
        words: names of local groups if not English.
    """

    code: str
    weight: float
    latitude: float
    longitude: float
    cities: tuple[str, ...]
    words: tuple[str, ...] = ()


def _country(code: str, weight: float, at: tuple[float, float], cities: str, words: str = "") -> Country:
    return Country(code, weight, *at, _split(cities), _split(words) if words else ())


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split("|"))


COUNTRIES: tuple[Country, ...] = (
    _country(
        "us", 41.7, (39.0, -96.0),
        "New York|Washington|San Francisco|Chicago|Los Angeles|Austin|Seattle|Boston|Denver|Dallas|Atlanta|Houston|"
        "San Diego|Portland|Philadelphia|Phoenix|Miami|Minneapolis|San Jose|Charlotte|Orlando|Tampa|Nashville|Raleigh|"
        "Pittsburgh|Baltimore|Sacramento|Columbus|Cleveland|Detroit|Saint Louis|Kansas City|Salt Lake City|Las Vegas|"
        "Richmond|Milwaukee|Madison|Boulder|Oakland|Berkeley|Tucson|Albuquerque|Honolulu|New Orleans|Louisville",
    ),
    _country(
        "gb", 16.0, (52.5, -1.5),
        "London|Manchester|Brighton|Bristol|Edinburgh|Glasgow|Leeds|Birmingham|Oxford|Cambridge|Cardiff|Liverpool|"
        "Sheffield|Nottingham|Reading|Belfast|York|Bath|Newcastle|Southampton|Exeter|Norwich|Leicester",
    ),
    _country("au", 7.8, (-30.0, 147.0), "Sydney|Melbourne|Brisbane|Perth|Adelaide|Canberra|Hobart|Newcastle|Geelong"),
    _country(
        "de", 3.8, (51.0, 10.0), "Berlin|München|Hamburg|Köln|Frankfurt|Stuttgart|Düsseldorf|Leipzig|Nürnberg",
        "Stammtisch für Neugierige|Wandern & Radeln|Spieleabend|Freunde der Küche|Müßiggänger|Bücherwürmer",
    ),
    _country(
        "es", 3.8, (40.0, -3.5), "Barcelona|Madrid|Valencia|Sevilla|Málaga|Bilbao|Palma",
        "Intercambio de idiomas|Senderismo los sábados|Club del niño interior|Cañas y conversación|Tertulia española",
    ),
    _country(
        "fr", 2.7, (47.0, 2.5), "Paris|Lyon|Toulouse|Bordeaux|Lille|Nantes|Marseille|Grenoble",
        "Café des rêveurs|Randonnée & découverte|Soirées à thème|Apéro des développeurs|Théâtre et poésie",
    ),
    _country("ca", 2.5, (49.0, -95.0), "Toronto|Vancouver|Montréal|Calgary|Ottawa|Edmonton|Victoria|Halifax"),
    _country("nl", 2.0, (52.2, 5.3), "Amsterdam|Utrecht|Rotterdam|Den Haag|Eindhoven|Groningen"),
    _country(
        "il", 1.9, (32.0, 34.9), "Tel Aviv-Yafo|Haifa|Jerusalem|Herzliya",
        "מפגש מפתחים|טיולים בשבת|ערב משחקים|קפה ושיחה",
    ),
    _country(
        "jp", 1.9, (35.6, 138.0), "Tokyo|Osaka|Kyoto|Yokohama|Fukuoka",
        "もくもく会|言語交換カフェ|週末ハイキング|読書会|ボードゲームの夜",
    ),
    _country("ae", 1.9, (25.0, 55.2), "Dubai|Abu Dhabi", "لقاء القهوة|مشي الصباح|نادي القراءة"),
    _country("hk", 1.2, (22.3, 114.2), "Hong Kong|Kowloon", "週末行山|語言交流|桌遊之夜"),
    _country("sg", 1.2, (1.35, 103.8), "Singapore"),
    _country(
        "in", 1.6, (17.0, 77.0), "Bangalore|Mumbai|New Delhi|Pune|Hyderabad|Chennai",
        "सुबह की सैर|किताबों का क्लब|चाय पर चर्चा",
    ),
    _country("ie", 1.0, (53.3, -7.5), "Dublin|Cork|Galway"),
    _country(
        "it", 0.9, (43.0, 12.0), "Milano|Roma|Torino|Bologna",
        "Aperitivo linguistico|Città e caffè|Passeggiate romane",
    ),
    _country("nz", 0.9, (-40.0, 175.0), "Auckland|Wellington|Christchurch|Dunedin"),
    _country("ch", 0.8, (46.9, 8.0), "Zürich|Genève|Basel|Bern", "Bergwanderer Zürich|Rencontres genevoises"),
    _country("be", 0.7, (50.8, 4.4), "Brussels|Antwerpen|Gent|Leuven"),
    _country("se", 0.6, (58.5, 16.0), "Stockholm|Göteborg|Malmö", "Språkkafé|Äventyr på fjället"),
    _country("dk", 0.5, (55.7, 11.0), "København|Aarhus", "Sprogcafé|Gåture på Nørrebro"),
    _country("no", 0.5, (60.0, 9.0), "Oslo|Bergen", "Fjelltur på søndag|Språkkafé"),
    _country("fi", 0.4, (61.0, 25.0), "Helsinki|Tampere", "Kielikahvila|Sunnuntairetki järvelle"),
    _country("at", 0.4, (47.8, 14.0), "Wien|Graz|Salzburg", "Gemütliche Runde|Kaffeehausgespräche"),
    _country("pt", 0.4, (39.5, -8.5), "Lisboa|Porto", "Caminhadas de sábado|Tertúlia à beira-rio"),
    _country("br", 0.5, (-20.0, -46.0), "São Paulo|Rio de Janeiro|Florianópolis", "Café e código|Trilhas de verão"),
    _country("mx", 0.4, (20.0, -100.0), "México|Guadalajara|Monterrey", "Intercambio en el café|Excursión de otoño"),
    _country("ar", 0.4, (-34.5, -60.0), "Buenos Aires|Córdoba|Rosario", "Charlas de café|Caminatas porteñas"),
    _country("cl", 0.3, (-33.4, -70.7), "Santiago|Valparaíso", "Salidas al cerro|Cafecito bilingüe"),
    _country("co", 0.3, (5.0, -74.2), "Bogotá|Medellín", "Tertulia paisa|Caminata por el páramo"),
    _country("pe", 0.2, (-12.0, -77.0), "Lima|Cusco"),
    _country("tw", 0.6, (24.5, 121.2), "Taipei|Kaohsiung|Taichung", "週末登山社|咖啡與程式|讀書會"),
    _country("cn", 0.5, (31.2, 118.0), "Shanghai|Beijing|Shenzhen", "周末徒步|英语角|桌游之夜"),
    _country("kr", 0.4, (37.2, 127.2), "Seoul|Busan", "언어 교환 모임|주말 등산|독서 모임"),
    _country("th", 0.4, (14.0, 100.6), "Bangkok|Chiang Mai", "แลกเปลี่ยนภาษา|เดินป่าวันหยุด"),
    _country("vn", 0.2, (16.0, 107.0), "Ho Chi Minh|Hà Nội|Đà Nẵng", "Cà phê tiếng Anh|Đi bộ cuối tuần"),
    _country("my", 0.3, (3.2, 101.7), "Kuala Lumpur|Penang"),
    _country("id", 0.2, (-6.3, 106.9), "Jakarta|Bali"),
    _country("ph", 0.2, (14.6, 121.0), "Manila|Cebu"),
    _country("za", 0.5, (-29.0, 24.0), "Cape Town|Johannesburg|Durban|Pretoria"),
    _country("ke", 0.2, (-1.3, 36.8), "Nairobi|Mombasa"),
    _country("ng", 0.2, (6.6, 3.4), "Lagos|Abuja"),
    _country("eg", 0.2, (30.0, 31.2), "Cairo|Alexandria", "نادي المشي|أمسية شعرية"),
    _country("tr", 0.4, (40.0, 31.0), "İstanbul|Ankara|İzmir", "Dil değişimi|Yürüyüş günü"),
    _country("gr", 0.3, (38.2, 23.5), "Athens|Thessaloniki", "Καφές και κουβέντα|Πεζοπορία της Κυριακής"),
    _country("pl", 0.5, (52.0, 19.5), "Warszawa|Kraków|Wrocław|Gdańsk", "Wieczór gier|Wędrówki po górach"),
    _country("cz", 0.3, (49.9, 15.0), "Praha|Brno", "Jazyková kavárna|Výlety za město"),
    _country("hu", 0.3, (47.3, 19.2), "Budapest|Szeged", "Nyelvcsere kávéval|Túrázók köre"),
    _country("ro", 0.2, (45.0, 25.5), "București|Cluj-Napoca", "Seară de jocuri|Plimbări în oraș"),
    _country("bg", 0.2, (42.6, 24.0), "Sofia|Plovdiv", "Клуб на читателя|Разходки в планината"),
    _country("ua", 0.3, (49.5, 30.8), "Kyiv|Lviv|Odesa", "Розмовний клуб|Прогулянки містом"),
    _country("rs", 0.2, (44.5, 20.6), "Beograd|Novi Sad", "Шетња и кафа|Вече игара"),
    _country("hr", 0.2, (45.6, 16.0), "Zagreb|Split", "Večer društvenih igara|Šetnja uz more"),
    _country("lt", 0.1, (54.9, 24.5), "Vilnius|Kaunas"),
    _country("lv", 0.1, (56.9, 24.2), "Riga"),
    _country("ee", 0.1, (59.2, 25.0), "Tallinn|Tartu"),
    _country("cr", 0.1, (9.9, -84.1), "San José"),
    _country("is", 0.1, (64.1, -21.7), "Reykjavík"),
    _country("ma", 0.1, (33.5, -7.0), "Casablanca|Rabat", "مقهى اللغات|جولة في المدينة"),
    _country("om", 0.1, (23.6, 58.3), "Muscat"),
)  # fmt: skip

# Towns of English-speaking countries join one word of each list.
TOWN_BEGINS = _split("Oak|Maple|Cedar|River|Lake|Mill|Ash|Fair|Green|Spring|West|East|North|Clear|Stone|Brook")

TOWN_ENDS = _split("dale|ville|ton|field|port|wood|bridge|ford|ham|haven|view|crest")

TOWN_COUNTRIES = frozenset({"us", "gb", "au", "ca", "nz", "ie"})

STATES = {
    "us": _split("CA|NY|TX|FL|IL|MA|WA|VA|PA|CO|GA|NC|OR|MD|NJ|OH|AZ|MN|MI|TN"),
    "ca": _split("ON|BC|QC|AB|MB|NS"),
}

# Topics: the commonest stand alone; the others join one word of each list.
PLAIN_TOPICS = _split(
    "Hiking|Social|Fun Times|Outdoors|Fitness|New In Town|Dining Out|Adventure|Board Games|Language Exchange|"
    "Travel|Photography|Walking|Coffee|Yoga|Singles Over 30|Cycling|Live Music|Wine|Startups|Programming|"
    "Wellness|Dancing|Self-Improvement|Entrepreneurs|Book Club|Running|Camping|Meditation|Museums|Volunteers|"
    "Cooking|Nightlife|Theatre|Web Developers|Data Science|Food Lovers|Creative Writing|Film|Parents|Dogs|"
    "Learning|Small Business|Weekend Trips"
)

TOPIC_KINDS = _split(
    "Beginner|Weekend|Urban|Outdoor|Indoor|Modern|Classical|Vintage|Digital|Open Source|Family|Women's|Men's|"
    "Senior|Young Professional|Creative|Practical|Advanced|Casual|Competitive|Local|International|Spanish|French|"
    "Japanese|German|Italian|Chinese|Russian|Arabic|Nordic|Celtic|Latin|African|Asian|Vegan|Organic|Mindful|"
    "Spiritual|Healthy|Morning|Evening|Night|Winter|Summer|Coastal|Mountain|Lakeside|Garden|Street|Studio|Solo|"
    "Group|Charity|Student|Alumni|Expat|Newcomer|Analytical|Experimental"
)

TOPIC_THINGS = _split(
    "Hiking|Cycling|Running|Swimming|Sailing|Climbing|Kayaking|Skiing|Tennis|Football|Volleyball|Badminton|Golf|"
    "Chess|Card Games|Role Playing|Painting|Drawing|Pottery|Knitting|Sewing|Woodwork|Photography|Film|Theatre|"
    "Opera|Jazz|Guitar|Singing|Choir|Salsa|Swing|Tango|Ballet|Cooking|Baking|Wine|Beer|Tea|Coffee|Dining|Brunch|"
    "Gardening|Beekeeping|Birdwatching|Astronomy|Physics|Mathematics|Philosophy|History|Poetry|Novels|Journalism|"
    "Blogging|Podcasting|Marketing|Sales|Finance|Investing|Real Estate|Leadership|Design|Robotics|Electronics|"
    "Cloud Computing|Machine Learning|Security|Databases|Networking|Conversation|Meditation|Yoga"
)

GROUP_FORMS = _split(
    "{city} {topic} Meetup|The {city} {topic} Society|{topic} in {city}|{topic} Lovers of {city}|"
    "{city} {topic} & Friends|Greater {city} {topic} Circle|{city}'s {topic} Enthusiasts|"
    "{topic} for Everyone: {city}"
)

EVENT_FORMS = _split(
    "{day} {topic} and a drink after|Monthly {topic} gathering: all levels welcome|"
    "{topic}: an introduction for newcomers|{day} evening {topic}|Let's talk about {topic} over coffee|"
    "{topic} by the river, {day} at noon|Open {topic} session (bring a friend!)|"
    "{day} social with a little {topic}|Potluck & {topic} ★ {day}|“{topic}” – an evening with guests|"
    "{topic} workshop, part {number} of 12|{day} morning {topic}, rain or shine ☔|{topic} for the curious|"
    "New members' {topic} night|Annual {topic} picnic 🎉"
)

DAYS = _split("Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday")

VENUE_FORMS = _split(
    "The {word} Café|{word} Community Centre|{word} Park, north gate|{word} Street Library|{word} House|"
    "The {word} & Crown|{word} Hall|Studio {word}|{word} Square|The Old {word}"
)

VENUE_WORDS = _split(
    "Anchor|Bramble|Copper|Dover|Elm|Falcon|Granary|Harbour|Ivory|Juniper|Kestrel|Linden|Meridian|Nettle|Orchard|"
    "Plum|Quarry|Raven|Saffron|Thistle|Union|Velvet|Willow|Yarrow|Zephyr"
)

FIRST_NAMES = _split(
    "Anna|Ben|Carla|David|Elena|Felix|Grace|Hugo|Ines|Jack|Katja|Liam|Maria|Noah|Olga|Paul|Quentin|Rosa|Sam|Tara|"
    "Uwe|Vera|Will|Xenia|Yusuf|Zoë|José|Łukasz|Søren|Françoise|Jürgen|Åsa|Nuño|Chloé|Mária|Ömer|Zdeněk|Thảo|"
    "Дмитрий|Ольга|Сергей|Νίκος|Ελένη|יעל|דוד|أحمد|ليلى|健太|美咲|小明|芳|지훈|서연|राहुल|प्रिया|สมชาย|Aroha|Kwame|Chidi"
)

LAST_NAMES = _split(
    "A.|B.|C.|D.|E.|F.|G.|H.|J.|K.|L.|M.|N.|O.|P.|R.|S.|T.|V.|W.|Z.|Fisher|Novak|Silva|Haddad|Okafor|Lindqvist|"
    "Moreau|Tanaka|Kim|Rossi|Becker|Walsh|Garcia|Nguyen|Singh|Kowalska|Иванова|Παππάς|כהן|田中|王|김|शर्मा|Ångström"
)
